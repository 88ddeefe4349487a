"""Registers every operator, so that tests of graphs can name any of them."""

from __future__ import annotations

import importlib
import pkgutil

import terrazzo.ops

for _module in pkgutil.iter_modules(terrazzo.ops.__path__):
    importlib.import_module(f"terrazzo.ops.{_module.name}")
