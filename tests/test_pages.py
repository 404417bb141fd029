"""What the script that runs the commands of pages takes of them, and what it writes into them."""

import os

from benchmarks import pages

PAGE = """Words.

```
$ echo one; echo two \\
    and a half
$ echo three
...
an old line
another one
```

```python
print("four")
```

It prints

```
an old answer
```

```
$ true
```

```
echo left alone
```

```python
left_alone
```

```
too
```
"""


def test_commands_are_run_and_their_last_lines_shown(tmp_path):
    records = [pages.run(block, tmp_path, dict(os.environ)) for block in pages.blocks(PAGE)]
    assert [record["output"] for record in records] == [["one", "two and a half", "three"], ["four"], []]
    page = pages.filled(PAGE, records)
    assert "$ echo three\n...\ntwo and a half\nthree\n```" in page
    assert "```\nfour\n```" in page
    assert page.count("\n") == PAGE.count("\n")
    assert pages.filled(page, records) == page
