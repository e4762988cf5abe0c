"""Yardsticks, not products."""
