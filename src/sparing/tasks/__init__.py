"""Texts and pretrained models that measurements run on."""
