"""Runs whose records are kept in `results/`: each module is one command that can be stopped and started again."""
