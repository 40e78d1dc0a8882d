"""Texts of the source that name a flag and advise nobody."""

NOT_ADVICE: dict[str, str] = {
    "cli main text": "arguments of a command without any",
    "cli main text #2": "an argument that is looked for",
    "cli.commands constant text": "the flag that lists all flags",
    "config.recipe_file command_line text": "the command line of a recipe, which the tests of recipes run",
    "config.recipe_file command_line text #2": "the same for steps",
    "config.unused_flags order_notes text #2": "how long the run takes",
    "report.frontier Frontier._reached text": "part of a sentence of the report",
    "report.verdict verdict text": "part of a sentence of the report",
    "tasks.labelled_rows SeveralClasses.learn_labels text": "a fact",
    "run.ladder _climb text": "the name of a stage",
    "serving.kserve constant text": "a comment in a written file",
    "engines.choose _choice text #2": "a fact, which other text continues",
    "engines.choose _choice text #3": "a fact, which other text continues",
    "serving.python_backend.openvino_session _options code": "an error inside a server of another processor",
    "cli.commands Command.parse_args text": "the end of flags",
    "config.fields flag_of text": "the flag of any field",
    "config.fields shown text": "any field with its value",
    "config.rules _subject text": "the steps that a message is about",
    "studies.figures lines_with_ranges text": "the style of a line",
    "tasks.causal_lm Streams.__init__ text": "a fact",
    "serving.tensorrt_engines constant text": "a flag of Triton's server, which a note names",
}
"""Key -> why following it is not tested."""
