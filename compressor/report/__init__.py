"""The report of a run: its data, its verdict, its page and its summary in the terminal."""

from compressor.report.files import HTML_NAME, JSON_NAME, load, write
from compressor.report.judgement import verdict
from compressor.report.schema import (
    EngineFacts,
    Latency,
    Point,
    Proof,
    Refusal,
    Report,
    Score,
    SiteBlocks,
    Speed,
)
from compressor.report.terminal import summary

__all__ = [
    "HTML_NAME",
    "JSON_NAME",
    "EngineFacts",
    "Latency",
    "Point",
    "Proof",
    "Refusal",
    "Report",
    "Score",
    "SiteBlocks",
    "Speed",
    "load",
    "summary",
    "verdict",
    "write",
]
