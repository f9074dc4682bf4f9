"""Programs for those who change this repository; no wheel and no image holds them."""
