"""`python -m train.plan`: whether compression pays on a cluster."""
