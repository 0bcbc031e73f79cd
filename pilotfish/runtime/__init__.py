"""The model runtime of both workers: paged KV cache, attention, decoder, weights, sampling."""
