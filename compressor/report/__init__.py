"""The report of a run: its data, its verdict, its HTML page and its summary in the terminal."""

from compressor.report.files import HTML_NAME, JSON_NAME, load, write, write_page
from compressor.report.terminal import summary
from compressor.report.verdict import verdict

__all__ = ["HTML_NAME", "JSON_NAME", "load", "summary", "verdict", "write", "write_page"]
