"""The error of weights from elsewhere that do not fit."""


class WeightsError(ValueError):
    """Weights, or their `config.json`, are not this model's; the message says how."""
