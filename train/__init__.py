"""The commands that train models, and those that launch and plan trainings."""
