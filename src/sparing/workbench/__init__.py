"""Measure the error, the work and the speed of a call or a model, and draw conclusions."""
