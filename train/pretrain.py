"""`python -m train.pretrain`: see `train.bert.pretrain`."""

from train.bert.pretrain import main

if __name__ == "__main__":
    main()
