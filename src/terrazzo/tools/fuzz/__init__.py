"""Programs made at random, compiled and held against their meaning."""
