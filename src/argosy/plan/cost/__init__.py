"""What a plan costs, in closed form: memory, traffic, time, failures, money and energy; predictions made of these."""
