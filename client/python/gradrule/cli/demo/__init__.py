"""`gradrule demo`: a binary network trained on handwritten digits through a server, with a rule and without."""
