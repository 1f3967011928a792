"""What a plan costs: memory, traffic, time, failures, money and energy, in closed form."""
