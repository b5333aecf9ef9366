"""Tests of the measuring."""
