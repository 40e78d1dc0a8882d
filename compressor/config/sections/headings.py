"""Headings under which the fields of a recipe are listed, and a value that several of them take."""

MODEL, DATA, HEADS, BUDGET, BLOCKS, DISTILLATION = "Model", "Data", "Heads", "Budget", "Blocks", "Distillation"
ENGINE, MEASURING, OUTPUT = "Engine", "Measuring", "Output"
HEADINGS = (MODEL, DATA, HEADS, BLOCKS, BUDGET, DISTILLATION, ENGINE, MEASURING, OUTPUT)
"""The headings in the order in which `--help` lists them: that of the steps of a run."""
AUTO = "auto"
"""Value of a field whose choice is measured on this machine."""
