"""Models that come with infinity."""

from infinity.models.gpt import GPT, GPTConfig, parse_spec

__all__ = ["GPT", "GPTConfig", "parse_spec"]
