"""Texts of the source that name a flag and advise nobody."""

NOT_ADVICE: dict[str, str] = {
    "cli main text": "arguments of a command without any",
    "cli main text #2": "an argument that is looked for",
    "cli.field_options constant text": "a flag's other spelling",
    "config.recipe_file command_line text": "the command line of a recipe, which the tests of recipes run",
    "report.figures constant text": "a colour",
    "report.figures constant text #2": "a colour",
    "report.figures constant text #3": "a colour",
    "report.figures constant text #4": "a colour",
    "report.figures constant text #5": "a colour",
    "report.frontier Frontier._reached text": "part of a sentence of the report",
    "report.verdict _drop text": "part of a sentence of the report",
    "tasks.several_classes SeveralClasses.learn_labels text": "a fact",
    "run.ladder _climb text": "the name of a stage",
    "run.pruning.bisect_metric _bisect text": "a fact",
    "run.pruning.bisect_metric _note text #2": "a fact",
    "serving.kserve constant text": "a comment in a written file",
    "run.engine_choice.choose_engine _choice text": "a fact, which other text continues",
    "run.engine_choice.choose_engine _choice text #2": "a fact, which other text continues",
    "cli.command_group Command.parse_args text": "the end of flags",
    "config.fields flag_of text": "the flag of any field",
    "latency.history_plot _plot_slowdowns text": "the style of a line",
    "studies.figures lines_with_ranges text": "the style of a line",
    "tasks.segment_streams Streams.__init__ text": "a fact",
    "serving.tensorrt_engines constant text": "a flag of Triton's server, which a note names",
}
"""Key -> why following it is not tested."""
