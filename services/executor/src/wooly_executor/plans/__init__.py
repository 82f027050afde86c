"""Plans of programs: when they are asked for, where they come from, and what becomes of them."""
