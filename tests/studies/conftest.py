"""Helpers of the search tests serve here too, and studies lie beside the package."""
