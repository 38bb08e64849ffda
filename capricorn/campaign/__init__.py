"""Fault campaigns: which cases, drawn how, judged how, and what failures cost."""
