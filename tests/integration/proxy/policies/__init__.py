"""Which policy and which of its versions answers a call, and how it samples."""
