"""Chat templates that would take for ever, or all memory."""

_DOUBLE = (
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}"
)
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * 10**8 }}",
    "{{ ([0] * 10**9) | length }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x\n' | indent(10**9) }}",
    "{{ lipsum(n=10**6) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{{ m(n) ~ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ (range(99999) | list) * 10**5 }}",
    "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaa!' | replace('', 'x' * 10**7) }}",
    "{% set l = [] %}{% for i in range(99999) %}{% do l.append(l) %}{% endfor %}",
    "{{ cycler('a').next.__func__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include 'etc/passwd' %}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ " + "-" * 20_000 + "1 }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "1+" * 50_000 + "1 }}",
    "{{ strftime_now('%Y' * 10**7) }}",
    "{{ strftime_now('\\ud800') }}",
    "{{ raise_exception('x' * 10**7) }}",
    "{{ raise_exception('a\nb') }}",
    "{{ '\\ud800' }}",
    "{{ '\\ud800' * 100 }}{{ '\ufeff' }}",
    _DOUBLE,
)
