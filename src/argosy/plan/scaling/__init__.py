"""The scaling law: loss as a function of parameters and tokens, fitted to small runs."""
