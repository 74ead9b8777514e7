"""The scorecard: every promise about crashes, faults, bad input and hostile programs, shown by injecting them."""
