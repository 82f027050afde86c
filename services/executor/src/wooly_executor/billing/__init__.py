"""Bills: counts and prices what each session uses of the device, and publishes the counts."""
