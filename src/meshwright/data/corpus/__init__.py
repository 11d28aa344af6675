"""Build, cache and open corpora of token ids."""
