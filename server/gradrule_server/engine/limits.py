"""What bounds an answer."""

from __future__ import annotations

# A message ends at 2 GiB; the rest is for names and for what the front end adds.
MAX_ANSWER_BYTES = 2**31 - 2**26
