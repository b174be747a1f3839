"""Wire formats: bytes into requests, outputs into bytes."""
