"""The costs of a plan, in closed form: memory, traffic, time, failures, money, energy; and predictions."""
