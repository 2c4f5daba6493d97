"""Models of Hugging Face's `transformers`, unmodified, on a mesh: loading and generation.

It needs the extra `models`; nothing is imported from there before it is used.
"""

from .generation import generate, stream
from .loading import empty_model, from_pretrained

__all__ = ["empty_model", "from_pretrained", "generate", "stream"]
