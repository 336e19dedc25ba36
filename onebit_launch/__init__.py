"""`onebit-launch`: a Python command in several processes that find each other."""
