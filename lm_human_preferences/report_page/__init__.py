"""The page that tells what runs were: one HTML file that needs nothing else.

Knows the facts of runs and how a page is made. It measures nothing, asks no network of weights, and
loads no torch; what it says in sentences comes from run_story/.

    render.py           from the directories of runs to the file
    frontier.py         the evaluation: a policy beside the best one possible
    training_curves.py  score, KL, value and loss, and what happened on the way
    sample_choice.py    which samples are shown, side by side
    label_section.py    labels and labellers
    provenance.py       commands, versions, digests, settings
    compared_runs.py    several runs beside one another
    charts.py           lines and points as SVG
    safe_text.py        text of others
    templates/          the HTML, its style and its script
"""
