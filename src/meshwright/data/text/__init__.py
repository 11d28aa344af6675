"""Turn text into tokens: tokenizers, chat templates, and the learnt parts of a record."""
