"""The scheduler: admission, policy and audit of every GPU that Wooly shares."""
