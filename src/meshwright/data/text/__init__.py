"""Turn text into tokens: tokenizers, chat templates, and what is learnt from a record."""
