"""Text to tokens: tokenizers, chat templates, and what is learnt from a record."""
