"""What users hold, on the compiled core. It replaces the classes of the same names one floor up."""
