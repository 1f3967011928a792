"""The costs of a plan, in closed form: memory, traffic, time, failures, money and energy; and predictions made of
these."""
