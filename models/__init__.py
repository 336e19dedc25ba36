"""Flax NNX models: BERT and its heads, a decoder, and networks for images."""

from models.bert import Bert, Encoder
from models.config import SIZES, BertConfig
from models.convolutional import (
    ConvolutionalConfig,
    ResNet,
    SmallNet,
    convolutional,
    pooled_statistics,
)
from models.decoder import DECODER_SIZES, Decoder, DecoderConfig, next_token_loss
from models.fine_tuning import BertForQuestionAnswering, SpanBatch, span_loss
from models.huggingface_names import WeightsError
from models.pretraining import BertForPreTraining, PreTrainingBatch, pretraining_losses
from models.stack import stack_layers, unstack_layers

__all__ = [
    "DECODER_SIZES",
    "SIZES",
    "Bert",
    "BertConfig",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "ConvolutionalConfig",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "PreTrainingBatch",
    "ResNet",
    "SmallNet",
    "SpanBatch",
    "WeightsError",
    "convolutional",
    "next_token_loss",
    "pooled_statistics",
    "pretraining_losses",
    "span_loss",
    "stack_layers",
    "unstack_layers",
]
