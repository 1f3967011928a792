"""Every key of a TOML text is found at its line, however it is written."""

from argosy.config.lines import key_lines

TEXT = '''\
# a comment
name = "x"  # [not a table]
a.b = 1
"quo ted" = """
[also.not]
c = 3
"""

[table]
list = [
  1,  # one
  { inner = 2 },
]
table2 = { deep = { er = 1 } }

[[rows]]
x = 1
[[rows]]
x = 2
[rows.sub]
y = 3
'''


def test_every_key_is_found_at_its_line():
    for text in (TEXT, TEXT.replace("\n", "\r\n")):
        assert key_lines(text.replace("\r\n", "\n")) == {
            ("name",): 2,
            ("a",): 3,
            ("a", "b"): 3,
            ("quo ted",): 4,
            ("table",): 9,
            ("table", "list"): 10,
            ("table", "table2"): 14,
            ("table", "table2", "deep"): 14,
            ("table", "table2", "deep", "er"): 14,
            ("rows", 0): 16,
            ("rows", 0, "x"): 17,
            ("rows", 1): 18,
            ("rows", 1, "x"): 19,
            ("rows", 1, "sub"): 20,
            ("rows", 1, "sub", "y"): 21,
        }
