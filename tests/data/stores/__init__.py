"""Tests of prepared data in object stores."""
