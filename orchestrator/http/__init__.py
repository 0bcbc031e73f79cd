"""The OpenAI-compatible gateway: HTTP in, the same requests as over gRPC, HTTP and server-sent events out."""
