"""Helpers of the search tests serve here too."""
