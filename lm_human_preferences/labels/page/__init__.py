"""A page in the browser where one person or many answer the questions of a folder.

    service.py        what a labeller can do: questions, answers, skips, undo; no HTTP
    assignments.py    which labeller is asked which question now
    key.py            the secret that links, cookies and the order on the screen follow from
    access.py         links, cookies, and what the browser calls the questions
    guard.py          what every request is checked for, and what every reply says to the browser
    app.py            the routes
    connections.py    time limits of a connection
    server.py         the server, in a thread of its own
    page.html         the page: HTML, CSS and JavaScript in one file

Knows no torch: the page is there in a second. No request leaves the machine.
"""
