"""Module that ends the importing process with exit code 0."""

import os

os._exit(0)
