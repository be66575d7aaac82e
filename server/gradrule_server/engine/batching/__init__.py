"""Dynamic batching: several calls of one program run as one where that is proven to change no answer."""
