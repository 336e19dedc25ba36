"""Flax NNX models: BERT and its heads."""

from models.bert import Bert
from models.config import SIZES, BertConfig
from models.pretraining import BertForPreTraining, PreTrainingBatch, pretraining_losses
from models.stack import stack_layers, unstack_layers

__all__ = [
    "SIZES",
    "Bert",
    "BertConfig",
    "BertForPreTraining",
    "PreTrainingBatch",
    "pretraining_losses",
    "stack_layers",
    "unstack_layers",
]
