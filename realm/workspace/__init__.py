"""A workspace: a folder made from documents by one command, that answers questions about them.

folder      WORKSPACE/{kb,model,report.json}, open for questions and changes
"""
