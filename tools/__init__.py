"""Programs for maintainers of this repository; no wheel and no image contains them."""
