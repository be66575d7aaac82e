"""`gradrule demo`: trains a binary network on handwritten digits through a server, with and without a rule."""
