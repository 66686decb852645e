"""The worked examples in the agents' prompts: questions with their queries."""

from __future__ import annotations

# Question, query, and the result of an earlier, wrong query.
POOL = (
    (
        "How many employees have department Sales?",
        "SELECT COUNT(*) FROM employee WHERE department = 'Sales'",
        "no such column: Sales",
    ),
    (
        "How many employees have age above 50?",
        "SELECT COUNT(*) FROM employee WHERE age > 50",
        "no such table: employees",
    ),
    (
        "How many projects have hours below 100?",
        "SELECT COUNT(*) FROM project WHERE hours < 100",
        "no such table: projects",
    ),
    (
        "List the name of employees with salary above 9000.",
        "SELECT name FROM employee WHERE salary > 9000",
        'near "above": syntax error',
    ),
    (
        "List the name of employees with age below 30.",
        "SELECT name FROM employee WHERE age < 30",
        "nothing found",
    ),
    (
        "List the title of projects with hours above 300.",
        "SELECT title FROM project WHERE hours > 300",
        "no such column: name",
    ),
    (
        "What is the max salary of employees with department Legal?",
        "SELECT MAX(salary) FROM employee WHERE department = 'Legal'",
        "nothing found",
    ),
    (
        "What is the min age of employees with department Press?",
        "SELECT MIN(age) FROM employee WHERE department = 'Press'",
        "no such function: MINIMUM",
    ),
    (
        "What is the avg salary of employees with department Design?",
        "SELECT AVG(salary) FROM employee WHERE department = 'Design'",
        "nothing found",
    ),
    (
        "What is the age of the employee with name Ada?",
        "SELECT age FROM employee WHERE name = 'Ada'",
        "no such column: Ada",
    ),
    (
        "What is the department of the employee with name Hugo?",
        "SELECT department FROM employee WHERE name = 'Hugo'",
        "nothing found",
    ),
    (
        "What is the city of the department with name Sales?",
        "SELECT city FROM department WHERE name = 'Sales'",
        "no such column: Sales",
    ),
    (
        "List the name of employees whose department has city Rome.",
        "SELECT name FROM employee WHERE department IN "
        "(SELECT name FROM department WHERE city = 'Rome')",
        "no such column: city",
    ),
    (
        "List the title of projects whose department has city Oslo.",
        "SELECT title FROM project WHERE department IN "
        "(SELECT name FROM department WHERE city = 'Oslo')",
        "no such column: city",
    ),
)
